from mixproof.verify.subjects.mutants import Mutant

MUTANTS: tuple[Mutant, ...] = ()
