"""Predict memory, communication and time of a run, without a device.

step.py has the closed forms of a step (builders/memory.py has memory's), workload.py the rows of a step;
estimate.py applies them to a config, and search.py compares settings. simulate/ counts what the code of a step does.
"""
