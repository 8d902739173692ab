"""What is run in two checkouts and compared: programs and results of loops, steps and restores.

Everything is written with names and spellings that both checkouts know: parts by name, `joined` for
chains of gradient transforms.
"""
