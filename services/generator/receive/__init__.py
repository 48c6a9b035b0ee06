"""Receives pushed weights, and swaps them into the engine. The trainer's package ``push`` sends them.

A push takes this path:

    process of the generator
        weight_routes.py                    HTTP: join, begin, commit, abort, sleep (shared/control.py)
        weight_receiver.py                  knows the served run; handles its requests one after the other
        weight_swap.py                      makes the moves: checks their order, pauses, loads, resumes, probes
        guarded_engine.py                   gives each call to the engine a deadline
        engine/receiving_engine.py          makes the calls to vLLM
             |  vLLM's collective_rpc                                     ^  worker/worker_reports.py: progress
             v                                                            |
    every worker process of the engine, or the engine core if it is the only worker
        worker/worker_transfer.py           receives in a thread while the engine decodes, then loads
        worker/model_check.py               checks before the transfer that all the model's parameters are announced
        worker/weight_wires.py              opens a wire to the trainer: gloo_wire, nccl_wire, ipc_wire or disk_wire
        worker/staged_weights.py            keeps the new weights; applies deltas, computes the checksum
        worker/model_load.py                loads the staged weights into vLLM's model

Chunks, checksums, deltas and the files of a version are defined in ``shared/weights``, for both ends of the push.
Adapters take the same path; vLLM loads them from files (engine/adapter.py). engine/output_gate.py holds back what new
weights sample until the probe has confirmed them; engine/probe_scheduler.py has vLLM compute the probe first.
"""
