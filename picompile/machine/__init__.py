"""The machines that models are planned and compiled for: a table, one row a machine, and this machine as measured.

`targets` has the table and looks rows up. `measured` adds the target `local`, this machine, with the figures that `gpu`
and `host` measure. `targets` imports none of the other three.
"""
