"""The training loop of rank 0. A batch takes this path:

training_loop.py          waits for a batch, trains on it, pushes and saves; calls everything below
    ../intake             groups in, and the choice of the batch
    batch_trainer.py      scores the batch, then makes its optimizer steps
        train_rows.py     groups to minibatches and rows
        in_hand.py        remembers across crashes which groups are being computed on
        ../policy         forward, backward, optimizer step
        post_mortem.py    saves the inputs of a step that was not finite
    outflow.py            weights out
        push_schedule.py      when to push (../push sends)
        checkpoint_saver.py   when to save, and acks the groups of a checkpoint on disk
    reporting.py          progress, steps and evaluations, for users

assembly.py builds these objects for one run. resumed.py loads its data, its model and its newest checkpoint.
"""
