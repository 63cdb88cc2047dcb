"""The simulation kit of tests and benchmarks: a local bus, and one simulated engine with behaviours to plug in.

`SimulatedEngine` speaks real gRPC and holds a real lease, but has no model. What it answers is a function
(`answers`); what goes wrong, and when, are its settings; a prefill or decode engine (`simulated_pair`) really needs its
peer; `PacedEngine` keeps slots and time and takes pushes, hundreds of them in one process.
`services.rollout.testing` adds an engine that really receives weights, with the receiver of the real one.
"""
