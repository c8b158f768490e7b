"""What the demo tells of where things are."""

import profiles
from processes import Processes
from rich.console import Console
from screen import Screen
from story import Demo


def test_the_dashboard_is_told_with_its_token() -> None:
    values = {"TAPHOUSE_EXTRACTOR_PORT": "8123", "TAPHOUSE_DEMO_RUN": "elsewhere"}
    profile = profiles.load("smoke", values, {}, move_ports=False)
    demo = Demo(profile, Processes(profile.settings.run, {}), Screen(Console()), keep=True)
    assert "http://127.0.0.1:8123/ " in demo.dashboard and " elsewhere/api.token " in demo.dashboard
    assert demo.dashboard in demo.urls()
