"""What stands in for a model's tensors, modules and functions while its code runs without them. By job:

::

    placeholder   a tensor without numbers; unknown: a plain value that another stage has
    clone         shallow clones of modules, whose calls are answered by somebody else; followed, memoised, scripted:
                  what is in them
    glue          torch functions that the model's code calls itself; functions, opaque, checkpoints: custom autograd
                  functions, transforms and recomputation, which are one call each
    spec          inputs and modes for which what was seen holds
    absent        modules whose weights other processes have
"""
