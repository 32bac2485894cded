"""The web page of operators and planners: a static shell, and one address that says what its reader may see."""
