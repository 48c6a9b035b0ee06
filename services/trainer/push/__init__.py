"""The trainer's side of the weight push; services/generator/receive is the other side. A push takes this path:

loop/push_schedule.py         decides when a push is due
prober.py                     the trainer's logprobs of the probe
weight_sender.py              the steps of a push, two attempts, the required version
replicas.py, membership.py    which generators take part; calls to them; when a failed one is tried again
outgoing.py                   what is sent: all weights or only changes (sent_weights.py), or files (disk_writer.py)
communicator_epochs.py        join, begin, broadcast, commit, abort
transports.py                 opens a communicator: gloo_communicator (also ipc), nccl_communicator
packing.py                    weights to chunks, and their checksum
blame.py                      waits for the generators in a step, and finds which are to blame when it fails
push_result.py                the outcome
push_settings.py              the settings of a run's pushes
"""
