"""A model's own code, run without numbers, and what was seen of it. By job:

::

    dry_run       the run; effects, filled, touched, made_up: what leaves units otherwise, and what needs numbers
                  all the same
    ops           what was seen: calls of units and glue; values: which of them use and make which
    uncertain     shapes that depend on numbers, by way of what they are made of
    bonds         calls that one stage has to run together; shared, global_state: by what they keep elsewhere
    refusals      why a model cannot be run so
"""
