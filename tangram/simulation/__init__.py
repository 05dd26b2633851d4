"""The scheduler's pure core on a virtual clock: what the actions of a trace cost under a policy, on a pool.

The core is the product's own: `step` folds a log of encoded messages, `plan` and `compose` decide. What stands around it
here is virtual: the log's stamps, the executors, the trajectories. Only the executors know how long an action takes.
"""
