"""The ``prfaas`` command. Sub-commands load when they run, so that ``prfaas --help`` is quick and free of torch."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import click

ENTRY_POINTS = "prfaas.commands"

_OWN = {
    "gateway": ("gateway.commands.run:gateway", "Run a gateway in front of joined nodes."),
    "clusters": ("gateway.commands.operate:clusters", "Register, list, drain and remove prefill clusters."),
    "nodes": ("gateway.commands.operate:nodes", "List the nodes that have joined, and change their roles."),
    "status": ("gateway.commands.operate:status", "Show whether a gateway can serve, and what it has."),
    "keys": ("gateway.commands.keys:keys", "Create, list and revoke API keys."),
    "certs": ("gateway.commands.certs:certs", "Make and rotate the installation's own certificates."),
    "audit": ("gateway.commands.audit:audit", "Show who changed what, and which nodes were turned away."),
    "tenants": ("gateway.commands.tenants:tenants", "Say what tenants may use, and how much their work weighs."),
    "decisions": ("gateway.commands.decisions:decisions", "List and export routing decisions, decide them again."),
    "explain": ("gateway.commands.explain:explain", "Say why a request was sent where it went."),
    "profile": ("gateway.commands.profile:profile_command", "Measure a running stack for the simulator."),
    "reload": ("gateway.commands.reload:reload_gateway", "Have a gateway read its configuration file again."),
    "simulate": ("gateway.commands.simulate:simulate_command", "Simulate a fleet under traffic, request by request."),
    "report": ("gateway.commands.report:report", "Reports for capacity planners."),
    "plan": ("gateway.commands.plan:plan", "Work out capacities and splits; approve what a gateway proposes."),
}


class LazyGroup(click.Group):
    """Our commands by name, and those that other rooms announce in the entry point group ``prfaas.commands``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing any command."""
        return [*_OWN, *sorted(set(self._others()) - set(_OWN))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command. Raises ClickException where its package lacks something."""
        if cmd_name in _OWN:
            module, _, attribute = _OWN[cmd_name][0].partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        entry = self._others().get(cmd_name)
        if entry is None:
            return None
        try:
            loaded: click.Command = entry.load()
        except ImportError as error:
            raise click.ClickException(
                f"prfaas {cmd_name} needs {error.name or error}: install the engine extra, pip install 'prfaas[engine]'"
            ) from error
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands; those of other rooms explain themselves."""
        rows = [
            (name, _OWN[name][1] if name in _OWN else f"See prfaas {name} --help.") for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _others(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


@click.group(cls=LazyGroup)
@click.version_option(package_name="prfaas")
def main() -> None:
    """A cross-datacenter Prefill-as-a-Service gateway for LLM serving."""


if __name__ == "__main__":
    main(prog_name="prfaas")
