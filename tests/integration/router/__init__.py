"""The router over simulated engines, singly and in pairs, and clients that it sends to them."""
