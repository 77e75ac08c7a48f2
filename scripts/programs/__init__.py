"""Random training programs, run ordinarily and managed, and compared bit for bit; scripts/stress_programs.py runs them.

faults.py      the ways in which a runtime like this one was seen to go wrong, and what each may cost
program.py     a program as data: typed instructions over named tensors, in phases
render.py      a program as Python source: what is run, and what is printed for a reader
parts.py       what programs are made of beside torch: modes, subclasses, functions, custom ops
driver.py      runs the steps of a program and writes down every bit that must not change
builder.py     puts instructions together while a program is made
fillers.py     what any training program may do
attacks/       what goes for one kind of fault each, in a phase that is asked for
generator.py   seed and number -> program
settings.py    policy, tiers, budget, `verify`: how a program is managed
runner.py      one program: ordinary, ordinary again, managed; the verdict
coverage.py    which fault was tried with values in which place, and when
minimise.py    the smallest program that still goes wrong
workers.py     processes that run programs; what crashes or hangs is found out
"""
