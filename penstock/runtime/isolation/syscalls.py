"""The Linux system calls that a worker process does not need, by architecture.

Numbers are the kernel's: x86_64 has its own table; aarch64 has the generic one, which lacks calls that an `*at` form
replaced. Calls from `FIRST_RECENT` on have the same number everywhere; C libraries work without them.
"""

from typing import NamedTuple


class Architecture(NamedTuple):
    """System call numbers of one architecture."""

    audit_id: int
    """AUDIT_ARCH_*, which tells a filter the table of a call's number."""
    denied: tuple[int, ...]
    """Calls that are denied whatever their arguments."""
    denied_strictly: tuple[int, ...]
    """Calls that a process without files and with fixed limits does not need either."""
    opens: tuple[tuple[int, int], ...]
    """Calls that open a file, each with the index of its flags argument."""
    clone: int
    fcntl: int
    ioctl: int
    prlimit: int


FIRST_RECENT = 424
"""pidfd_send_signal; then io_uring, pidfd_open, clone3, openat2, the new mount calls, and all later ones."""

_DENIED = {
    # name: (x86_64, aarch64); the network
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # other processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    # files that stay
    "creat": (85, None),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "memfd_create": (319, 279),
    "open_by_handle_at": (304, 265),
    # shared memory and queues
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    # the machine and its kernel
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "personality": (135, 92),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "capset": (126, 91),
}

_DENIED_STRICTLY = {
    # files
    "open": (2, None),
    "openat": (257, 56),
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "access": (21, None),
    "faccessat": (269, 48),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "chdir": (80, 49),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    # limits, and dying with the parent
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
}

ARCHITECTURES = {
    "x86_64": Architecture(
        audit_id=0xC000003E,
        denied=tuple(numbers[0] for numbers in _DENIED.values()),
        denied_strictly=tuple(numbers[0] for numbers in _DENIED_STRICTLY.values()),
        opens=((2, 1), (257, 2)),
        clone=56,
        fcntl=72,
        ioctl=16,
        prlimit=302,
    ),
    "aarch64": Architecture(
        audit_id=0xC00000B7,
        denied=tuple(number for _, number in _DENIED.values() if number is not None),
        denied_strictly=tuple(number for _, number in _DENIED_STRICTLY.values() if number is not None),
        opens=((56, 2),),
        clone=220,
        fcntl=25,
        ioctl=29,
        prlimit=261,
    ),
}
"""Tables by `platform.machine()`."""
