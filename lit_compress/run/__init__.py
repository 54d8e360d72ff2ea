"""A run: one Trainer per stage, the run folder, TensorBoard, and the export at the end.

stages/ and methods/ hold the computation of a stage; here stages are run one after another, stopped and continued.
Begin with runner.py; folder.py knows the files of a run, finish.py turns a finished run into an export.
"""
