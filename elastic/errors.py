"""The exceptions of elasticd and the exit codes of `elasticd run`.

    ElasticError                       exit
    +-- UsageError                     2    a flag, key, value, password or certificate is wrong
    |   +-- StoreRefusedError          2    the store does not let us in: password, certificate, permission
    +-- JobFailedError                 1    the job cannot go on
    |   +-- BudgetSpentError           1    more failures than --max-restarts within --restart-window
    |   +-- NoUsableCheckpointError    1    there are checkpoints and none of them is good
    |   +-- NonFiniteGradientError     1    a gradient is inf or NaN and nothing allows to skip the step
    |   +-- DatasetChangedError        1    the checkpoint was made from other data
    +-- NotEnoughNodesError            3    fewer than MIN nodes for --join-timeout
    +-- StoreGoneError                 4    the store was away for longer than --join-timeout
    +-- StorageGoneError               4    so was a file server, at the start
    +-- StoreUnavailableError          4    the store does not answer now; within --join-timeout it is waited for
    +-- StepsLostError                 5    stopped, but steps after the newest committed one are lost
    +-- DoNotRetryError                78   a worker said that a retry is useless (EX_CONFIG)

A worker that has a session and ends with an exception, of whatever kind, whose `retry_is_useless` is true marks its
progress block `fatal`: the agent then ends the job with exit 1 at once instead of spending the restart budget on a
failure that would come back.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What `elasticd run` returns to its caller."""

    SUCCEEDED = 0
    FAILED = 1
    USAGE = 2
    NOT_ENOUGH_NODES = 3
    STORE_GONE = 4
    STEPS_LOST = 5
    DO_NOT_RETRY = 78
    DRAINED = 143


class ElasticError(Exception):
    """Base of every error elasticd raises on purpose; the message names the thing, the value and the remedy."""

    exit_code: ExitCode = ExitCode.FAILED
    retry_is_useless = False


class UsageError(ElasticError):
    """A flag, a key of the job file or a combination of values is wrong."""

    exit_code = ExitCode.USAGE
    retry_is_useless = True


class StoreRefusedError(UsageError):
    """The store answered and will not let us in: the password, a certificate or a permission is wrong."""


class JobFailedError(ElasticError):
    """The job cannot go on, and trying again would not help."""

    retry_is_useless = True


class BudgetSpentError(JobFailedError):
    """More failures than --max-restarts within --restart-window."""


class NoUsableCheckpointError(JobFailedError):
    """There are checkpoints and none of them can be restored."""


class NonFiniteGradientError(JobFailedError):
    """A gradient is inf or NaN and neither a scaler nor `nonfinite = "skip"` allows to skip the step."""


class DatasetChangedError(JobFailedError):
    """The checkpoint's position counts samples of another dataset."""


class NotEnoughNodesError(ElasticError):
    """Fewer than MIN nodes were there for --join-timeout."""

    exit_code = ExitCode.NOT_ENOUGH_NODES


class StoreGoneError(ElasticError):
    """The store did not answer for longer than --join-timeout."""

    exit_code = ExitCode.STORE_GONE


class StorageGoneError(ElasticError):
    """The file server of what the job needs did not answer, at the start: --checkpoint-dir, --log-dir, the script."""

    exit_code = ExitCode.STORE_GONE


class StoreUnavailableError(ElasticError):
    """The store did not answer in time; it may do so later."""

    exit_code = ExitCode.STORE_GONE


class StepsLostError(ElasticError):
    """The job was stopped before the steps after the newest committed one could be saved."""

    exit_code = ExitCode.STEPS_LOST


class DoNotRetryError(ElasticError):
    """A worker exited with 78 (EX_CONFIG): its configuration is wrong, a retry is useless."""

    exit_code = ExitCode.DO_NOT_RETRY
