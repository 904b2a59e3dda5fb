"""How a model is cut, in words: units, stages, what crosses, as a table and as JSON."""
