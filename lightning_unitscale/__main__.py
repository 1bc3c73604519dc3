"""Run the command line without its console script: `python -m lightning_unitscale`."""

from lightning_unitscale.cli import main

if __name__ == "__main__":
    main()
