"""Training data: from files of records to the micro-batches of a step.

Read in this order, each file one step of the way:

    sources.py    files to records          tokenizer.py  the tokenizer and its special tokens
    formats.py    records to examples       tokenize.py   examples to tokens and what is trained
    template.py   conversations to text     packing.py    examples into sequences
    build.py      all of that, to disk      cache.py      once a node, reused by the next run
    sampler.py    which sequences a step takes      batch.py      the tensors of a micro-batch

Only `batch.py` imports torch.
"""
