"""The exceptions of the checkpoints package.

CheckpointError
+-- UnsupportedStateError      save: a leaf of the state is of a kind that cannot be stored
+-- DisturbedError             settle: what was called steady has changed while it was copied
+-- CheckpointMismatchError    restore: tensors are missing, extra, or of another shape or dtype
+-- FingerprintError           restore: the state counts samples of other data
+-- NoUsableCheckpointError    restore: there are checkpoints and none of them is good
+-- StaleRoundError            a later round, or another incarnation's, was here already
+-- CorruptCheckpointError     one checkpoint did not verify; a restore falls back and says so
+-- NoDriverError              nothing here can reach the kind of URL that was given
+-- CoordinationError          a peer or the store did not answer in time
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of every error this package raises on purpose."""

    retry_is_useless = False  # the same would be found again; `elasticd run` then does not start the workers anew


class UnsupportedStateError(CheckpointError):
    """A leaf of the state is of a kind that cannot be stored without pickle; the message has its full key."""


class DisturbedError(CheckpointError):
    """A tensor was changed before `settle`, although `keep` or `save` was told that it is steady; it is named."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint's tensors are not those of the live state; the message lists them."""

    retry_is_useless = True


class FingerprintError(CheckpointError):
    """The checkpoint was made from other data than the one at hand."""

    retry_is_useless = True


class NoUsableCheckpointError(CheckpointError):
    """There are checkpoints and none of them can be restored; the message lists each with its reason."""

    retry_is_useless = True


class StaleRoundError(CheckpointError):
    """The directory holds states of a later round, or of the same round of another incarnation."""


class ForeignDirectoryError(CheckpointError):
    """The directory is another job's by now."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, damaged or foreign."""


class NoDriverError(CheckpointError):
    """No file system of fsspec's is installed for the scheme of the URL; the message says what to install."""

    retry_is_useless = True


class CoordinationError(CheckpointError):
    """A peer or the store did not answer by the deadline, or the store is gone."""
