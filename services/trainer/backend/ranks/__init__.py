"""Many ranks: who computes what of a step, over weights that each of them holds a share of."""
