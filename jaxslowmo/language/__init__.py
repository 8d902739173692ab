"""The language models of the command line, and the text they train on."""
