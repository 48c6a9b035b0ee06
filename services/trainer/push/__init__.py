"""The trainer's side of the weight push; services/generator/receive is the other side. A push takes this path:

loop/push_schedule.py         decides when a push is due
prober.py                     computes the trainer's logprobs of the probe
weight_sender.py              makes the push, in at most two attempts, and then publishes the required version
replicas.py, membership.py    choose the generators that take part, call them, and decide when to retry a failed one
outgoing.py                   prepares all weights, or only changes (sent_weights.py), or files (disk_writer.py)
communicator_epochs.py        makes the steps of an attempt: join, begin, broadcast, commit, abort
transports.py                 opens a communicator: gloo_communicator (also ipc), nccl_communicator
packing.py                    cuts weights into chunks, and computes their checksum
blame.py                      waits for the generators in a step, and finds which are to blame when it fails
push_result.py                holds the outcome
push_settings.py              holds the settings of a run's pushes
"""
