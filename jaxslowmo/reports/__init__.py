"""Reports on what a program sends, and on how a step spends its time."""
