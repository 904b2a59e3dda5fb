"""A model's own code, run without numbers, and what was seen of it. By job:

::

    placeholder   a tensor without numbers
    clone         shallow clones of the model, whose calls are answered by somebody else; followed: what changes in it
    glue          torch functions that the model's code calls itself
    dry_run       the run; effects, made_up: what leaves units otherwise, and what needs numbers all the same
    ops           what was seen: calls of units and glue, and the values that they use and make
    spec          for which inputs and modes that holds
    refusals      why a model cannot be run so
"""
