"""A step of a known model on a known cluster, as the tests of this folder begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bitwright import comms, hardware
from bitwright.parallel.efficiency import efficiency_of
from bitwright.parallel.job import DEFAULT_SOFTWARE, Job, Software, Tuning
from bitwright.parallel.layout import Layout
from bitwright.parallel.network import ClusterNetwork
from bitwright.parallel.numerics import numerics_of
from bitwright.training.policy import policy_named

MakeJob = Callable[..., Job]


@pytest.fixture
def make_job() -> MakeJob:
    """A function that makes a step; what it is not told is a Llama-3-8B on one node, uncalibrated."""

    def make(
        model: str = "llama-3-8b",
        cluster: str = "h100x8",
        *,
        policy: str = "bf16-mixed",
        sequence: int = 4096,
        global_batch: int = 64,
        software: Software = DEFAULT_SOFTWARE,
        **layout: Any,
    ) -> Job:
        topology = comms.topology(cluster)
        device = hardware.get(str(topology.device))
        return Job(
            shape=hardware.KNOWN_MODELS.get(model).shape,
            sequence=sequence,
            global_batch=global_batch,
            layout=Layout(**layout),
            numerics=numerics_of(policy_named(policy)),
            device=device,
            efficiency=efficiency_of(device)[0],
            network=ClusterNetwork(topology=topology),
            software=software,
            tuning=Tuning(),
        )

    return make
