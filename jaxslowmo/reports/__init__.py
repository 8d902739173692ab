"""What a program sends, and what a step spends its time on."""
