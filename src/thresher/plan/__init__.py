"""Predict memory, communication and time of a run by formula, without a device.

model.py lists the parameters of one process, workload.py the rows of a step; memory.py, traffic.py and compute.py are
the formulas, and estimate.py applies them to a config.
"""
