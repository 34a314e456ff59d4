"""Architectures in pure torch: this package imports torch and itself."""

from models.base import Batch, Catalogue, SequenceModel
from models.bert4rec import BERT4Rec
from models.bsarec import BSARec
from models.caser import Caser
from models.esasrec import ESASRec
from models.fdsa import FDSA
from models.flash4rec import FLASH4Rec
from models.fpmc import FPMC
from models.gru4rec import GRU4Rec
from models.hstu import HSTU
from models.lrurec import LRURec
from models.mfbpr import MFBPR
from models.rec_denoiser import RecDenoiser
from models.recformer import Recformer
from models.recguru import RecGURU
from models.s3rec import S3Rec
from models.sasrec import SASRec
from models.ssept import SSEPT
from models.strec import STRec
from models.tisasrec import TiSASRec
from models.unisrec import UniSRec
from models.zesrec import ZESRec

REGISTRY: dict[str, type[SequenceModel]] = {
    "sasrec": SASRec,
    "esasrec": ESASRec,
    "flash4rec": FLASH4Rec,
    "hstu": HSTU,
    "bsarec": BSARec,
    "lrurec": LRURec,
    "strec": STRec,
    "gru4rec": GRU4Rec,
    "bert4rec": BERT4Rec,
    "caser": Caser,
    "fpmc": FPMC,
    "mfbpr": MFBPR,
    "tisasrec": TiSASRec,
    "ssept": SSEPT,
    "rec_denoiser": RecDenoiser,
    "recformer": Recformer,
    "zesrec": ZESRec,
    "unisrec": UniSRec,
    "fdsa": FDSA,
    "s3rec": S3Rec,
    "recguru": RecGURU,
}

__all__ = ["REGISTRY", "Batch", "Catalogue", "SequenceModel"]
