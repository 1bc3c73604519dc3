"""Capture of a module's steps as FX graphs by Dynamo, and running them once they are rewritten."""
