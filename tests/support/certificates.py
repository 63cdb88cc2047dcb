"""Certificates, made by the commands of docs/operation/security.md as they stand there."""

import re
import subprocess
from pathlib import Path

from penstock.config import SecurityConfig
from penstock.runtime.security import Security

PAGE = (Path(__file__).parents[2] / "docs/operation/security.md").read_text()


def make_certificates(folder: Path) -> SecurityConfig:
    """An authority and a certificate for this machine, in `folder`/certs."""
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run(["sh", "-ec", commands], cwd=folder, check=True, capture_output=True, timeout=200)
    certs = folder / "certs"
    return SecurityConfig(tls_cert=certs / "penstock.pem", tls_key=certs / "penstock.key", tls_ca=certs / "ca.pem")


def security_of(config: SecurityConfig | None = None, *, token: str = "", nats_token: str = "") -> Security:
    """As a process would have it that was started with this."""
    return Security.load(config or SecurityConfig(), {"PENSTOCK_TOKEN": token, "PENSTOCK_NATS_TOKEN": nats_token})
