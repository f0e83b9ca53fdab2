"""The configuration: the only place that reads the environment, and only through `load_settings`.

`groups` holds the settings, `values` how single ones are written and checked, `load` the way in, `reference`
their description. Every setting is one variable, SCHEDULER_<GROUP>_<FIELD>; a few have no group.
"""

from app.settings.groups import (
    ApiSettings,
    ClaimMode,
    ClaimSettings,
    DatabaseSettings,
    Detached,
    ExecutorSettings,
    KafkaSettings,
    LogFormat,
    LogLevel,
    LogSettings,
    PartitionSettings,
    PlannerSettings,
    RetentionSettings,
    Role,
    Settings,
)
from app.settings.load import load_settings
from app.settings.reference import describe, in_force

__all__ = [
    "ApiSettings",
    "ClaimMode",
    "ClaimSettings",
    "DatabaseSettings",
    "Detached",
    "ExecutorSettings",
    "KafkaSettings",
    "LogFormat",
    "LogLevel",
    "LogSettings",
    "PartitionSettings",
    "PlannerSettings",
    "RetentionSettings",
    "Role",
    "Settings",
    "describe",
    "in_force",
    "load_settings",
]
