"""Recipes that log write to files alone."""

import os

os.environ["WANDB_ERROR_REPORTING"] = "false"  # of the logger itself, over the network
os.environ["WANDB_SILENT"] = "true"
