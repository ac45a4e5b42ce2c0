"""CIFAR-10-C and CIFAR-100-C (Hendrycks and Dietterich 2019): the test images under 19 corruptions in 5 severities.

For evaluation only. Each corruption is an ``.npy`` file [50000, 32, 32, 3] uint8: 10,000 images of severity 1, then
those of severity 2, and so on. ``labels.npy`` [50000] holds the labels of every such file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from fedflat.data.dataset import Dataset, Examples
from fedflat.data.files.mapped import MappedTensor, open_mapped
from fedflat.data.sources.source import DatasetCard, Download, FileSource, md5_of
from fedflat.errors import UserError

CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The 15 corruptions of the benchmark."""
EXTRA_CORRUPTIONS: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The 4 corruptions intended for hyperparameter selection."""
SEVERITIES: tuple[int, ...] = (1, 2, 3, 4, 5)
"""Severities, from weak to strong."""
LABELS = "labels"


@dataclass(frozen=True)
class CorruptedCifar(FileSource[MappedTensor]):
    """All 10,000 test images are available for each corruption and severity (Hendrycks and Dietterich 2019).

    Attributes:
        root: folder of the files.
        of: dataset whose test images are corrupted.
        num_classes: number of classes.
        per_severity: number of images per corruption and severity.
    """

    root: str = ""
    of: str = ""
    num_classes: int = 10
    per_severity: int = 10_000

    def parse(self, path: Path) -> tuple[MappedTensor, str]:
        """Map the array in a file after checking the file's md5; returns the array and the sha256 of its values."""
        published, md5 = self.file_md5s.get(f"{self.root}/{path.name}"), md5_of(path)
        if published not in (None, md5):
            raise UserError(f"{path} differs from the published file (md5 {md5}; expected {published}); {self.remedy}")
        array = open_mapped(path)
        return array, hashlib.sha256(array.numpy().data).hexdigest()

    def read(self, data_dir: Path) -> Dataset:
        """Raise a ``UserError``: there is nothing to train on; see ``examples``."""
        raise UserError(
            f"{self.name} has no training images; train on {self.of} and evaluate on "
            f"fedflat.data.load_corruptions('{self.of}')"
        )

    def examples(self, data_dir: Path) -> dict[str, dict[int, Examples]]:
        """Return the test examples by corruption and severity (1 to 5); images are memory-mapped, not read.

        Images have shape [per_severity, 3, 32, 32]. A file holds all severities of a corruption, one after the other.
        """
        labels = self._open_array(data_dir, LABELS, ()).long()
        if int(labels.min()) < 0 or int(labels.max()) >= self.num_classes:
            wrong = labels[(labels < 0) | (labels >= self.num_classes)][0]
            raise UserError(
                f"{data_dir / self.root}/labels.npy has label {wrong}; expected 0 to {self.num_classes - 1}"
            )
        examples: dict[str, dict[int, Examples]] = {}
        for corruption in CORRUPTIONS + EXTRA_CORRUPTIONS:
            images = self._open_array(data_dir, corruption, (32, 32, 3)).channels_first()
            examples[corruption] = {}
            for severity in SEVERITIES:
                start, stop = (severity - 1) * self.per_severity, severity * self.per_severity
                images_of_severity = images.part(start, self.per_severity)
                examples[corruption][severity] = Examples(images_of_severity, labels[start:stop])
        return examples

    def _open_array(self, data_dir: Path, name: str, shape: tuple[int, ...]) -> MappedTensor:
        """Map the array in ``<name>.npy`` after checking its type and shape.

        Args:
            data_dir: the data directory.
            name: a corruption, or ``labels``.
            shape: shape of one row; () for labels, whose integer type may vary.
        """
        path = data_dir / self.root / f"{name}.npy"
        array, expected = open_mapped(path), (len(SEVERITIES) * self.per_severity, *shape)
        types = (torch.uint8,) if shape else (torch.uint8, torch.int32, torch.int64)
        if tuple(array.shape) != expected or array.dtype not in types:
            raise UserError(
                f"{path} contains {array.dtype} of shape {tuple(array.shape)}; expected uint8 of shape {expected}; "
                f"{self.remedy}"
            )
        return array


def _zenodo_source(name: str, of: str, record: int, md5: str, root: str, num_classes: int, md5s: str) -> CorruptedCifar:
    """Declare a dataset published on Zenodo.

    Args:
        name: name of the dataset.
        of: dataset whose test images are corrupted.
        record: number of the record on Zenodo.
        md5: md5 of the archive.
        root: folder in the archive.
        num_classes: number of classes.
        md5s: md5 of each file, separated by spaces, in alphabetical order of the files.
    """
    files = tuple(f"{root}/{file}.npy" for file in sorted((*CORRUPTIONS, *EXTRA_CORRUPTIONS, LABELS)))
    url = f"https://zenodo.org/records/{record}/files/{root}.tar"
    return CorruptedCifar(
        name,
        f"{root.removesuffix('-C')}'s test images under 19 corruptions in 5 severities (evaluation only)",
        (Download(url, md5, files),),
        file_md5s=dict(zip(files, md5s.split(), strict=True)),
        root=root,
        of=of,
        num_classes=num_classes,
        card=DatasetCard(
            examples="- / 19 x 5 x 10,000",
            shape="3x32x32",
            classes=str(num_classes),
            citation="Hendrycks and Dietterich 2019",
            licence="CC BY 4.0",
            size="2.9 GB",
            checks="md5 of the archive; md5 of all 20 files by `get` and `verify`; shapes and labels whenever read",
        ),
    )


CIFAR10_C = _zenodo_source(
    "cifar10_c",
    "cifar10",
    2535967,
    "56bf5dcef84df0e2308c6dcbcbbd8499",
    "CIFAR-10-C",
    10,
    """
    0a81ef75e0b523c3383219c330a85d48 3c8262171c51307f916c30a3308235a8 7d1322666342a0702b1957e92f6254bc
    9421657c6cd452429cf6ce96cc412b5f 7b397314b5670f825465fbcd1f6e9ccd 31f6ab3bce1d9934abfb0cc13656f141
    c33370155bc9b055fb4a89113d3c559d ecaf8b9a2399ffeda7680934c33405fd 7361fb4019269e02dbf6925f083e8629
    2090e01c83519ec51427e65116af6b1a 2b9cc4c864e0193bb64db8d7728f8187 c439b113295ed5254878798ffe28fd54
    fffa5f852ff7ad299cfe8a7643f090f4 0f14f7e2db14288304e1de10df16832f 1cfae0964219c5102abbb883e538cc56
    3a7239bb118894f013d9bf1984be7f11 bb238de8555123da9c282dea23bd6e55 8a5a3903a7f8f65b59501a6093b4311e
    ef00b87611792b00df09c0b0237a1e30 6ea8e63f1c5cdee1517533840641641b
""",
)

CIFAR100_C = _zenodo_source(
    "cifar100_c",
    "cifar100",
    3555552,
    "11f0ed0f1191edbf9fa23466ae6021d3",
    "CIFAR-100-C",
    100,
    """
    f22d7195aecd6abb541e27fca230c171 322bb385f1d05154ee197ca16535f71e d923e3d9c585a27f0956e2f2ad832564
    a0792bd6581f6810878be71acedfc65a 4efc7ebd5e82b028bdbe13048e3ea564 3a39c6823bdfaa0bf8b12fe7004b8117
    5204ba0d557839772ef5a4196a052c3e ecc4d366eac432bdf25c024086f5e97d 0bf384f38e5ccbf8dd479d9059b913e1
    3b3c210ddfa0b5cb918ff4537a429fef c851b7f1324e1d2ffddeb76920576d11 bb4026e9ce52996b95f439544568cdb2
    732a7e2e54152ff97c742d4c388c5516 96c00c60f144539e14cffb02ddbd0640 c0697e9fdd646916a61e9c312c77bf6b
    b0a1fa6e1e465a747c1b204b1914048a 0237be164583af146b7b144e73b43465 12ccf41d62564d36e1f6a6ada5022728
    e3f215b1a0f9fd9fd6f0d1cf94a7ce99 0204613400c034a81c4830d5df81cb82
""",
)
SOURCES = (CIFAR10_C, CIFAR100_C)
