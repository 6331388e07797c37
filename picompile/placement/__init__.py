"""Placement: which parts of a model are on the accelerator, and which are on the host.

`make_plan` makes a plan of three things: a model's bytes (`shape_bytes`, `count_bytes`), how its neurons fire
(`firing_of_curve`, `firing_of_profile`), and a machine (`machine_of` a target). To change a part, look here:

| part | where |
| --- | --- |
| what can be placed where | `problem.places_of`; the memory that it takes is `problem.fixed_bytes` |
| what it costs | `counting`, `times.LayerTimes`; `problem.impact_problem` has the paper's objective |
| the placement problem | `problem.PlacementProblem`: choices for each stage, two memories, transfers between stages |
| the solver | `solver.solve`, to a proven gap |
| placement by rules instead | `policies` |
"""
