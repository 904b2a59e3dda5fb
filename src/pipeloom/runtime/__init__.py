"""Running a schedule: what happens between `Pipeline.step` and the user's modules. The batch itself,
its micro-batches and their loss are `pipeloom.batch`'s. By job, the plainest first:

::

    the loop        executor     a rank walks its program
                    handlers     what each kind of action does
                    pairs        two actions at once, by a function of the user's
                    stage        the user's modules, called in order
                    selective    those of them that run again in the backward
    the ranks       local        all ranks of a pipeline in this process
                    threads      a thread for each, kept from step to step
                    replicas     two of the model on the same ranks, and their gradients one sum
                    control      the switch that ends a step on all of them
                    trace        when each action ran
    what travels    transport/   channels between ranks
                    boundary     what crosses a cut
                    crossing     what crosses the cuts of a model that was cut by running it
    one step        context      what its ranks share
                    gradients    add up as autograd does, or come back as they were
                    sums         add up in an order other than the one they come in
    the same bits   ambient      what the caller has switched on, in the thread of each rank
                    draw_key, draws, draw_kernels, foreign_draws   random numbers that do not depend on who runs what
                    batch_norm, buffer_history   buffers, also in a recompute
                    plain_history, buffer_aliases   counters and other attributes, and those that are a buffer
"""
