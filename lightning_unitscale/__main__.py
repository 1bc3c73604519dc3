"""`python -m lightning_unitscale` is the command line without its console script."""

from lightning_unitscale.cli import main

if __name__ == "__main__":
    main()
