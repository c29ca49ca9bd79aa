"""All jobs in one place: runs of the schedule's tasks and training runs, when they come next, and starting one by hand.

No rows of its own: ``common.BackgroundJob`` and ``training.Job`` are the truth, ids of both begin with their time.
"""
