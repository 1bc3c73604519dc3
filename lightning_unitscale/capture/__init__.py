"""Capture the steps of a module as FX graphs by Dynamo, and run the rewritten graphs."""
