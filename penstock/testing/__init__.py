"""The simulation kit of tests and benchmarks: a local bus, and a simulated engine with pluggable behaviour.

`SimulatedEngine` speaks real gRPC and holds a real lease, but has no model. Its answers are a function (`answers`), and
its faults are settings; a prefill or decode engine (`simulated_pair`) really needs its peer; `PacedEngine` keeps slots
and time and takes pushes, hundreds of them in one process. `services.rollout.testing` adds an engine that really
receives weights, through the receiver of the real one.
"""
