"""What the server and the forkserver say to each other."""

import struct

COMMAND = struct.Struct("<cI")
"""SPAWN or REAP, and the process id to reap."""
SPAWN = b"S"
"""Fork a worker; its socket comes along."""
REAP = b"R"
"""Wait for a worker that was killed."""
REPLY = struct.Struct("<I")
"""The new worker's process id; 0 once, to say that the forkserver is ready."""
