from meshwright.collectives.report import CollectiveReport as CollectiveReport
from meshwright.comm.api import collective as collective
from meshwright.errors import CheckFailed as CheckFailed
from meshwright.errors import MeshwrightError as MeshwrightError
from meshwright.errors import RankLost as RankLost
from meshwright.errors import Terminated as Terminated
from meshwright.errors import UserError as UserError
from meshwright.evaluation.api import Evaluation as Evaluation
from meshwright.evaluation.api import evaluate as evaluate
from meshwright.gallery.examples import explain as explain
from meshwright.gallery.explanation import Explanation as Explanation
from meshwright.layout import Layout as Layout
from meshwright.planner.api import Plan as Plan
from meshwright.planner.api import plan as plan
from meshwright.recipe import Recipe as Recipe
from meshwright.schedules.api import schedule as schedule
from meshwright.schedules.report import ScheduleReport as ScheduleReport
from meshwright.serving.api import Model as Model
from meshwright.serving.api import load as load
from meshwright.serving.generation import Generation as Generation
from meshwright.serving.serve import serve as serve
from meshwright.training.api import Result as Result
from meshwright.training.api import train as train
from meshwright.training.module.fit import fit as fit
from meshwright.verification.api import Verification as Verification
from meshwright.verification.api import verify as verify

__version__: str
