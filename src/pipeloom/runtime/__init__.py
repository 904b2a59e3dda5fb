"""Running a schedule: what happens between `Pipeline.step` and the user's modules. The batch itself,
its micro-batches and their loss are `pipeloom.batch`'s. By job, the plainest first:

::

    the loop        executor     a rank walks its program
                    handlers     what each kind of action does
                    stage        the user's modules, called in order
    the ranks       local        all ranks of a pipeline in this process
                    threads      a thread for each, kept from step to step
                    control      the switch that ends a step on all of them
                    trace        when each action ran
    what travels    transport/   channels between ranks
                    boundary     what crosses a cut
    one step        context      what its ranks share
                    gradients    add up as autograd does, or come back as they were
    the same bits   ambient      what the caller has switched on, in the thread of each rank
                    draw_key, draws, draw_kernels, foreign_draws   random numbers that do not depend on who runs what
                    batch_norm, buffer_history   buffers, also in a recompute
"""
