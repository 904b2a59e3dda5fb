"""A checkpoint as files: what makes it whole, what shows that it is damaged, and which one is the newest good one.

Nothing here knows a tensor: a shard is names, shapes and bytes. So a checkpoint is inspected and verified in
milliseconds, by a program that could not run anything in it.
"""
