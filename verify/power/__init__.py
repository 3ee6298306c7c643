"""How strong the gate is: mutants against its laws, and against the checks that people use today."""
