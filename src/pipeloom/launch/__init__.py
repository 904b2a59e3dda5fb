"""`pipeloom train --launch N`: ranks as processes, under torchrun's elastic agent. Importing this loads no torch.

By job::

    the launcher      agent       starts the ranks, starts them again, passes signals on
    each rank         rank        leaves word of how it ends
    between them      words       files in a folder that both know
    among the ranks   together    one decides, or one fails, for all; under any launcher
"""
