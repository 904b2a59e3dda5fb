"""`pipeloom train`: configuration, text, loop, figures. Importing this loads nothing heavy."""
