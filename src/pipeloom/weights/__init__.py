"""A model that was never whole anywhere: built without its parameters, which are read where they live.

``torch.device("meta")``, ``to_empty()`` and their like take the buffers away too: rotary frequencies, masks and batch
statistics come back as noise, silently. Loading a whole state dict and dropping most of it needs the whole model's
memory on each rank. Here a factory runs such that parameters cost nothing and buffers hold their values (`build`), and
each rank reads just what it owns, tensor by tensor::

    model = build(factory)                          # parameters on meta
    matched = match(model, Weights(path))           # every name is looked up, nothing is read
    materialise(places_of_my_stage, matched, device)
"""
