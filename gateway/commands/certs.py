"""``prfaas certs``: the installation's own certificates, from an offline root to what a gateway needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from gateway.certificates import files
from gateway.certificates.authority import DAY_S, Credential, create_root

_MOST_NAME_CHARS = 59
"""Of 64 that a common name has, less what follows it."""
_DIR = click.Path(file_okay=False, path_type=Path)
_HOSTS = click.option(
    "--host",
    "hosts",
    multiple=True,
    required=True,
    help="A name or address by which clients and nodes reach the gateway; may be repeated.",
)
_OUT = click.option("--out", type=_DIR, required=True, help="Folder for what the gateway needs.")
_DAYS = click.option(
    "--days", type=click.IntRange(1, 825), default=90, show_default=True, help="How long intermediate and gateway hold."
)


@click.group()
def certs() -> None:
    """Make and rotate the certificates of an installation: its own root, an intermediate, the gateway's.

    The root stays offline. The gateway gets the other folder (`prfaas gateway --ca DIR --tls-cert DIR/gateway.pem
    --tls-key DIR/gateway-key.pem`) and issues short-lived certificates to the nodes that join with a token.
    """


@certs.command("create")
@click.option("--root", type=_DIR, required=True, help="Folder for the root and its key; take it offline afterwards.")
@_OUT
@_HOSTS
@_DAYS
@click.option(
    "--root-days", type=click.IntRange(1, 7300), default=3650, show_default=True, help="How long the root holds."
)
@click.option("--name", default="prfaas", show_default=True, help="What the root is called.")
def create(root: Path, out: Path, hosts: tuple[str, ...], days: int, root_days: int, name: str) -> None:
    """Make a root, and under it an intermediate and a gateway's certificate."""
    _check_apart(root, out)
    if not (1 <= len(name) <= _MOST_NAME_CHARS and name.isprintable()):
        raise click.UsageError(f"--name: 1 to {_MOST_NAME_CHARS} printable characters")
    for path in (root / files.ROOT_KEY, out / files.INTERMEDIATE_KEY):
        if path.exists():
            raise click.UsageError(f"{path} exists; to renew what is below a root use `prfaas certs rotate`")
    now = time.time()
    made = create_root(f"{name} root", now, root_days)
    signed = _sign(made, hosts, days, now)
    _saving(lambda: files.write(root, files.ROOT, files.ROOT_KEY, [made.certificate], made))
    _saving(lambda: files.write_bundle(out, [made.certificate]))
    _save(signed, out, hosts, now)
    click.echo(f"{root / files.ROOT_KEY}: the root's key; take it offline, only `prfaas certs rotate` needs it again")


@certs.command("rotate")
@click.option("--root", type=_DIR, required=True, help="Folder with the root and its key.")
@_OUT
@_HOSTS
@_DAYS
def rotate(root: Path, out: Path, hosts: tuple[str, ...], days: int) -> None:
    """Replace intermediate and gateway's certificate. A running gateway takes them up by itself.

    What the old intermediate signed holds until it ends, a node's within a day; nodes renew theirs under the new one.
    Another root takes two runs: the first has it believed beside the old one, the second, when all nodes have renewed
    their certificates and so know it, signs under it.
    """
    _check_apart(root, out)
    now = time.time()
    try:
        made = files.read(root, files.ROOT, files.ROOT_KEY)
        known = files.read_certificates(out / files.ROOT) if (out / files.ROOT).exists() else []
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    signed = _sign(made, hosts, days, now)
    if made.certificate not in known:
        _saving(lambda: files.write_bundle(out, [made.certificate, *known]))
        if known:
            click.echo(
                f"{out / files.ROOT}: also believes the new root now; run this again when all nodes have renewed"
            )
            return
    _save(signed, out, hosts, now)


def _check_apart(root: Path, out: Path) -> None:
    if root.resolve() == out.resolve():
        raise click.UsageError("--root and --out: a gateway must not get the root's key; name two folders")


def _sign(root: Credential, hosts: tuple[str, ...], days: int, now: float) -> tuple[Credential, Credential]:
    """An intermediate, and a gateway's certificate under it; nothing is written yet."""
    try:
        below = root.intermediate(f"prfaas intermediate {time.strftime('%Y-%m-%d', time.gmtime(now))}", now, days)
        return below, below.server(hosts, now, days)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _save(signed: tuple[Credential, Credential], out: Path, hosts: tuple[str, ...], now: float) -> None:
    below, gateway = signed
    chain = [gateway.certificate, below.certificate]
    _saving(lambda: files.write(out, files.INTERMEDIATE, files.INTERMEDIATE_KEY, [below.certificate], below))
    _saving(lambda: files.write(out, files.GATEWAY, files.GATEWAY_KEY, chain, gateway))
    left = int((below.until - now) / DAY_S)
    click.echo(f"{out}: intermediate and certificate of {', '.join(hosts)}, for {left} days")


def _saving(write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
