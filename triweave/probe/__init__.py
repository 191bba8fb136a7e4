"""`triweave probe`: measures one machine, so that the planner speaks of this cluster.

Read in this order:

    shapes.py     what is measured: products, attention, operations of the models that are trained
    soak.py       how: in a mixture like a training step's, so that the card's power limit shows
    products.py, attention.py, operations.py, links.py, copies.py, beside.py, layers.py, host.py
                  one part each, all of which fill tables of `planner.profile`
    identity.py   which machine this is            file.py   the profile on the disk, kept after each part
    run.py        which parts, in which order, for how long
"""
