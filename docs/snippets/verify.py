import bitwright

plan = bitwright.load_plan("my-plan")
measured = bitwright.verify(plan, evaluation="my-text.txt")
print(measured.kl.mean, measured.ppl.ratio, measured.top1_agreement.mean)
