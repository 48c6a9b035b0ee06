"""Takes prompt groups, evaluations and user requests into the training loop. A group takes this path:

intake.py                 calls the others in order; the loop knows only this one
admission_pace.py         how many groups to admit now (groups/admission_depth.py, groups/staleness.py)
admission.py              rows of the data set to entries of the prompts stream
                              ... generators and rewarders ...
scored_groups.py          reads the scored stream; keeps each entry until a checkpoint has its group
batch_builder.py          drops a group, or chooses it for a batch; settles it in the ledger when it is trained
reward_failures.py        counts failures of reward functions; run_pause.py pauses the run

Beside the path: evaluation.py and running_evaluation.py measure the policy. external_changes.py reads user requests and
dead letters. reconcile.py accounts for every group when a trainer resumes. lost_writes.py admits groups again that
Redis has lost.
"""
