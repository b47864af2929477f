"""The paper's toy experiments, with all their baselines: an RBF net, and a data set compressed.

``rbf.py`` and ``mmd.py`` run one seed each and answer the paper's claims from the results;
``growth.py`` and ``descent.py`` are the two halves of every phase, ``results.py`` runs seeds in
processes and keeps the file, ``figures.py`` draws from that file alone, ``cli.py`` is the command.
"""
