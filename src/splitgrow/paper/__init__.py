"""The paper's experiments, with all their baselines.

``rbf.py``, ``mmd.py`` and ``prototypes.py`` run one seed each and answer the paper's claims from
the results. For toy problems ``growth.py`` and ``descent.py`` are the two halves of every phase;
real data (``data.py``) is trained on by ``training.py`` and changed at random by ``augment.py``.
``results.py`` runs seeds in processes and keeps the file, ``figures.py`` and its like draw from
that file alone, ``cli.py`` is the command.
"""
